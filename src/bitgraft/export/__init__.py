"""A task as a file for tools that know nothing of bitgraft."""
