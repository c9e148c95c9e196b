"""Transports of published weights from the training ranks to the engines."""
