"""Where memory goes: estimates by arithmetic, the timeline of a step, and probes that measure the real thing."""
