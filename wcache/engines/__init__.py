"""How engines take weights from the cache: one module an engine, imported by name."""
