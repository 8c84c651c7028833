"""TileLang kernels for SM90, one package per family. Loaded by name by gdn.runtime; see docs/architecture.md."""
