"""The commands: options, tables and exit codes; the work is done by the modules beside this folder."""
