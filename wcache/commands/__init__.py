"""One file and one function for each command of ``wcache``."""
