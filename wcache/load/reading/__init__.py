"""From a checkpoint's files into a rank's memory: what is read, through what, and by whom."""
