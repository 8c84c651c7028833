"""Replay decode outside of a decode call: states brought up to date, and the path of an accepted draft tree. DESIGN.md."""
