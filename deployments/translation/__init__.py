"""Files of other frameworks, translated into recipes."""
