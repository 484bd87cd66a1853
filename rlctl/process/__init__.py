"""Child processes; see ``child`` and ``channel``."""

from rlctl.process.channel import Channel as Channel
from rlctl.process.channel import Deadline as Deadline
from rlctl.process.child import Child as Child
from rlctl.process.child import ChildDied as ChildDied
from rlctl.process.child import Start as Start
from rlctl.process.child import start as start
from rlctl.process.running import LocalProcess as LocalProcess
from rlctl.process.running import Running as Running
from rlctl.process.running import describe_exit as describe_exit
from rlctl.process.spawning import TOKEN_VARIABLE as TOKEN_VARIABLE
from rlctl.process.spawning import Program as Program
from rlctl.process.spawning import die_with_parent as die_with_parent
from rlctl.process.spawning import run_child as run_child
from rlctl.process.spawning import run_token as run_token
from rlctl.process.spawning import spawn as spawn
