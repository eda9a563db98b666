"""What the user chose: schema, composition by Hydra, validation."""
