"""The commands of `penstock`: one module a group, imported cheaply and working lazily."""
