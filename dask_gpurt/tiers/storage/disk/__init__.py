"""Values in files on local disks."""
