"""Tools for tests that belong to no world: references, examples, mutations, tables."""
