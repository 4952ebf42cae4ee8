"""What everything else stands on: errors, units, logs, settings, atomic files."""
