"""Running ranks: launch, rendezvous, restart, stop, watchdog, emulated hosts."""
