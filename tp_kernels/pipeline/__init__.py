"""Pipeline parallelism: messages between stages, schedules as data, and one runner."""
