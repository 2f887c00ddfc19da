"""The console: pages in the browser to look into a broker and to change it.

A process of its own serves them, so that a long search delays neither metrics nor
requests. It reads no memory of the broker: it is a client of its own broker and logs in
as the user of each session. So the broker's ACLs decide what a user sees and does.
"""
