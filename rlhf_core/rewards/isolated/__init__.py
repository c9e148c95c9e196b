"""What user_process.py loads into a process that can be killed, file by file."""
