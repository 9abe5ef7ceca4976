"""How the processes of wcache talk: messages, descriptors, and both ends of a control socket."""
