"""The local stack: an S3 server, a Ray head, a Prefect server and a worker on this machine, run by supervisord."""
