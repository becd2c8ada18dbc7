"""A whole Onbeat on this machine: embedded Redis and all services as child processes of one command."""
