"""The runs that this machine knows: their records, their mirrored rows and logs, and the watching of one."""
