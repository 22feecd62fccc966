"""Which files of a project travel with a run, and which of them the remote lacks. `sync` brings them over."""
