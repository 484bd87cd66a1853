"""Rules on how a node is set up: each looks at what is given and says how it stands."""
