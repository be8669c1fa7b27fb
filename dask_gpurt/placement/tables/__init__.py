"""What placement knows of workers, tasks and links. Scheduler events feed these tables; decisions read them."""
