"""The components: each usable alone, without Launchpad, a network or an accelerator."""
