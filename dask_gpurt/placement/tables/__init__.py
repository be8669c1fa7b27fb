"""What is known of workers, tasks and links, fed by events of the scheduler."""
