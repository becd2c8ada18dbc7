"""The trainer's side of a job: its lease and stream, its heartbeat, what it waits for."""
