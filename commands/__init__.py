"""One file a subcommand: arguments in, one library call, rendering out."""
