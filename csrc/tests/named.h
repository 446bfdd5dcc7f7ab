// Test programs of which one test can be run: the tests of mutants name the one that has to find
// them.
#pragma once

#include <algorithm>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace tpk::test {

using Tests = std::vector<std::pair<std::string, void (*)()>>;

// Runs those named on the command line, or all.
inline int run_tests(int argc, char** argv, const Tests& tests) {
  for (int i = 1; i < argc; ++i) {
    const auto named = [&](const auto& test) { return test.first == argv[i]; };
    if (std::none_of(tests.begin(), tests.end(), named)) {
      std::cerr << "there is no test " << argv[i] << std::endl;
      return 2;
    }
  }
  for (const auto& [name, test] : tests) {
    if (argc == 1 || std::count(argv + 1, argv + argc, name)) test();
  }
  return 0;
}

}  // namespace tpk::test
