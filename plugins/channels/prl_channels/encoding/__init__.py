"""What is sent of a part: all of its bytes, or those elements that have changed.

full    all bytes
delta   changed elements, in the shortest of several forms
chain   the sender's memory of what it sent: what the next delta is against, and when a full version is due
decode  the way back
"""
