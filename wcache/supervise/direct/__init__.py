"""wcache's own supervisor, for machines and containers without systemd, and the client of it."""
