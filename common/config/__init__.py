"""Configuration: its schema, composition from files and overrides, and validation."""
