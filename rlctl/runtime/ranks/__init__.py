"""The trainer's ranks as child processes of the run, on one machine."""
