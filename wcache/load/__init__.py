"""The loader: plans, reads and publishes one rank's weights."""
