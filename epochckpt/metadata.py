"""placeholder until merged"""
def answered_epoch(h, a): return a
def check_handler(h): return h
