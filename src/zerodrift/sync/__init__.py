"""Did an engine take the trainer's update? Receipts that are measured, and publishing to several engines as one."""
