"""Which results of a stage can be taken again, and why not."""
