"""`python -m gdn` is `gdn`."""

from gdn.cli.app import main

if __name__ == "__main__":
    main()
