"""From an address to a kernel of ours: what was typed, the connection, those that are open, a cell sent to one."""
