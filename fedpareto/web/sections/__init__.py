"""The sections of a run's page: functions that give HTML, for the report (one file) and for the console (live)."""
