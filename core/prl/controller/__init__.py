"""The controller's process: it decides, and never touches token arrays.

hub        where every role registers, reports and is called
clients    environment workers, gateway and trainer as the loop sees them
fleet      the engines as one: installing weights, engines that come and go
silence    environment workers and engines that hang
health     engines that speak and do not work
gauges     how loaded the engines are, as metrics
scaling    more or fewer engines while the run goes on
report     status.json and summary.json
observing  from what the loop reports to hooks and monitors
control    what may be asked of a run that is going on
run        puts them together: start or resume, loop, checkpoints, summary, exit code
serving    the other controller, of `prl serve`: engines alone
"""
