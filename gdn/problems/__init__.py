"""Problems that every operator's kernels are compiled for, tuned for and launched with: one module per family of operators."""
