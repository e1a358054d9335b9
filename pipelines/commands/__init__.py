"""The commands of `penstock`: one module per group. Slow imports wait until a command runs."""
