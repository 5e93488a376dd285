"""Programs: one file per graph. Run them with `python -m programs.<name>`."""
