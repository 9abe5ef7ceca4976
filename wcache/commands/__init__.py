"""One file and one function for each command of ``wcache``, and the tables that they show."""
