"""The base of all packages: errors, units, logs, settings, atomic files."""
