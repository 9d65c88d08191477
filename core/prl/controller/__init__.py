"""The controller's process: it decides, and never touches token arrays.

hub      where every role registers, reports and is called
clients  environment workers, gateway and trainer as the loop sees them
fleet    the engines as one: installing weights, engines that come and go
silence  environment workers that hang
report   status.json and summary.json
control  what `prl pause|resume|checkpoint|evaluate|stop|why-stuck RUN` may ask
run      puts them together: start or resume, loop, checkpoints, summary, exit code
"""
