"""systemd as the supervisor of ranks: asked by systemctl, read by journalctl."""
