"""TileLang kernels for SM90, one operator per file. Loaded by name by gdn.runtime; see README, "Architecture"."""
