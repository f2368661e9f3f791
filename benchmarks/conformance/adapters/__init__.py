"""The adapters of this package, one framework a module. Each runs in the environment of its framework."""
