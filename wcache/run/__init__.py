"""Starting an engine, knowing when it really serves, and saying where the time went."""
