"""Where the processes of a run are started; see ``launcher`` and ``making``."""
