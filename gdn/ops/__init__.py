"""The public operators: contract, validation, allocation, one call into the runtime."""
