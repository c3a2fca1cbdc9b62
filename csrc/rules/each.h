/* each.h - the header of each rule, in REAL; included once for each way to compute. moments.h takes
 * what adam.h has. */
#include "rules/adadelta.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/adamax.h"
#include "rules/asgd.h"
#include "rules/lion.h"
#include "rules/moments.h"
#include "rules/nadam.h"
#include "rules/radam.h"
#include "rules/rmsprop.h"
#include "rules/rprop.h"
#include "rules/sgd.h"
